"""What a layout of ranks holds, hands over and comes to, by arithmetic alone: before a GPU is asked for."""

from .held import Held, held, largest
from .report import Report, report
from .scaling import LATENCY, Machine, Speed, choice, fastest, measured_rate, speed
from .traffic import Traffic, traffic

__all__ = [
    "LATENCY",
    "Held",
    "Machine",
    "Report",
    "Speed",
    "Traffic",
    "choice",
    "fastest",
    "held",
    "largest",
    "measured_rate",
    "report",
    "speed",
    "traffic",
]
