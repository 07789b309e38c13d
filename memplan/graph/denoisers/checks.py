"""What cannot be chosen for a diffusion transformer: diffusers' classes call what they call."""

from memplan.errors import SetupError
from memplan.graph.core.options import TapeOptions
from memplan.model.spec import ModelSpec
from memplan.training.choices_of_kernels.kernels import AttentionKernel, Kernels
from memplan.training.compilation import Compilation


def check_denoiser(model: ModelSpec, options: TapeOptions) -> None:
    """Refuse what is not modelled of diffusers' classes.

    Raises ``SetupError``, which names the field.
    """
    usual = Kernels(attention=options.kernels.attention)
    refused = {
        "attention": (
            options.kernels.attention is AttentionKernel.EAGER,
            "diffusers has no attention written out: choose sdpa or flash",
        ),
        "kernels": (
            options.kernels != usual,
            "diffusers' classes have their own: leave `kernels` and what overrides them out",
        ),
        "compile": (
            options.compile is not Compilation.NONE,
            "torch.compile of diffusion transformers is not modelled: leave it out",
        ),
        "pipeline_parallel": (
            options.stage is not None,
            "diffusion transformers are not cut in stages: share them with fsdp or deepspeed",
        ),
    }
    for name, (is_asked, words) in refused.items():
        if is_asked:
            msg = f"{name}: {model.name} ({model.family}): {words}"
            raise SetupError(msg)
