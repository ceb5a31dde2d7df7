"""subulp: optimizers that train models held entirely in low precision at fp32 quality."""

from subulp.convert import convert
from subulp.factory import from_config
from subulp.rounding import (
    add_stochastic_,
    addcdiv_stochastic_,
    copy_stochastic_,
    lerp_stochastic_,
    round_stochastic,
)
from subulp.rules.adafactor import Adafactor
from subulp.rules.adam import Adam
from subulp.rules.adamw import AdamW
from subulp.rules.came import CAME
from subulp.rules.lion import Lion
from subulp.rules.muon import Muon
from subulp.rules.prodigy import Prodigy
from subulp.rules.sgd import SGD
from subulp.rules.signsgd import SignSGD
from subulp.training.accumulation import GradientAccumulation
from subulp.training.ema import EMA
from subulp.training.fused_backward import FusedBackward

__version__ = "0.1.0"

__all__ = [
    "CAME",
    "EMA",
    "SGD",
    "Adafactor",
    "Adam",
    "AdamW",
    "FusedBackward",
    "GradientAccumulation",
    "Lion",
    "Muon",
    "Prodigy",
    "SignSGD",
    "add_stochastic_",
    "addcdiv_stochastic_",
    "convert",
    "copy_stochastic_",
    "from_config",
    "lerp_stochastic_",
    "round_stochastic",
]
