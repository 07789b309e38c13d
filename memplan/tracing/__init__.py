"""A user's own ``torch.nn.Module`` written down as a program that memplan plays (optional: needs torch).

``memplan.trace(module, example_inputs)`` is the way in. The module is run on the meta device: no weight is
read, nothing is computed, and no code runs but the module's own.
"""

from memplan.tracing.trace import trace

__all__ = ["trace"]
