"""Objects of a running script, before its first step: what will this very training need here?

``check`` looks at a Trainer, or at a model with its optimizer and a batch; ``MemplanCallback`` does so where a Trainer begins. Nothing is
imported that the script has not imported itself, nothing is allocated on a card, no random number is drawn.
"""

from memplan.live.callback import MemplanCallback
from memplan.live.checked import Checked
from memplan.live.checking import check

__all__ = ["Checked", "MemplanCallback", "check"]
