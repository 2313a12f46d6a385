"""What a layout of ranks holds, hands over and comes to, by arithmetic alone: before a GPU is asked for."""

from .card import CARDS, Fit, card_bytes, fastest_fit, fit
from .cards import Cards, cards
from .held import Held, held, largest
from .memory import Gpu, Memory, memory
from .report import Report, report
from .scaling import LATENCY, Machine, Speed, choice, fastest, measured_rate, speed
from .traffic import Traffic, traffic

__all__ = [
    "CARDS",
    "LATENCY",
    "Cards",
    "Fit",
    "Gpu",
    "Held",
    "Machine",
    "Memory",
    "Report",
    "Speed",
    "Traffic",
    "card_bytes",
    "cards",
    "choice",
    "fastest",
    "fastest_fit",
    "fit",
    "held",
    "largest",
    "measured_rate",
    "memory",
    "report",
    "speed",
    "traffic",
]
