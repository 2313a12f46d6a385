"""x"""
from .held import Held, held
from .traffic import Traffic, traffic
