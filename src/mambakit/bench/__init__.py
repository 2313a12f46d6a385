"""How fast this machine trains, decodes and reads data: operators, training steps, tokens, batches; beside other
implementations.

Machines differ, and the speed of one machine changes from hour to hour. So every figure comes with two rates of the
same run: how fast the device copies memory, and how fast it multiplies large matrices. Other implementations (peers)
are measured in the same way where they are installed.
"""

from .common import ReportPart, collect
from .generating import measure_decoding
from .operators import measure_ops
from .reading import measure_reading
from .training import measure_training

__all__ = ["ReportPart", "collect", "measure_decoding", "measure_ops", "measure_reading", "measure_training"]
