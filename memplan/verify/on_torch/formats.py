"""torch's names of number formats."""

import torch

from memplan.dtypes import DType

FORMATS = {DType.FP32: torch.float32, DType.BF16: torch.bfloat16, DType.FP16: torch.float16}
