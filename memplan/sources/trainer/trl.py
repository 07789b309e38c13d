"""What TRL's classes of arguments add to the Trainer's: lengths, packing, jobs, and how the model is loaded."""

from collections.abc import Mapping
from dataclasses import replace

from memplan.errors import SetupError, did_you_mean
from memplan.sources.trainer.flags import Flags
from memplan.sources.trainer.keys import (
    GENERATING,
    TRL_COMPLETION_LENGTH,
    TRL_LENGTH,
    TRL_PROMPT_LENGTH,
    WITHOUT_DROPOUT,
    trl_job,
    trl_remarks,
)
from memplan.training.choices_of_kernels.kernels import ATTENTION_NAMES, AttentionKernel, Packing
from memplan.units import ceil_div

_LOADED_IN = ("load_in_4bit", "load_in_8bit")
_BEST_FIT = ("bfd", "bfd_split", "ffd")
"""``packing_strategy`` (the last: its name in TRL 0.17) under which TRL drops the padding (``SFTTrainer.__init__``); the first by default."""


class TrlFlags(Flags):
    """The same of a file that may be TRL's."""

    def read_trl(self, found: dict[str, object]) -> None:
        """What TRL's trainers do besides; ``bf16`` and checkpointing have their own defaults."""
        config = self.trl
        assert config is not None
        self.notes += trl_remarks(config, self.values)
        has_adapter = self.given.get("adapter") is not None
        if self.given.get("job") is None:
            job = trl_job(config, self.values, has_adapter=has_adapter)
            if job is not None:
                found["job"] = {**job, **self._generated_at_once(job)}
        if self.flag("disable_dropout", default=config in WITHOUT_DROPOUT):
            found["dropout"] = 0.0
        if config in GENERATING:
            self._read_generated_length(found)
        else:
            self._read_length(found)
        self._read_packing(found)
        self._read_loading(found)

    def _read_packing(self, found: dict[str, object]) -> None:
        """Without padding all sequences lie in one row; so they do in the packing by best fit."""
        packed = self.trl == "SFTConfig" and self.flag("packing")
        strategy = self.values.get("packing_strategy", _BEST_FIT[0])
        if strategy not in (*_BEST_FIT, "wrapped"):
            known = ", ".join((*_BEST_FIT, "wrapped"))
            guess = did_you_mean(str(strategy), known.split(", "))
            self.refuse("packing_strategy", f"{strategy!r} is none of {known}.{guess}")
        if self.flag("padding_free") or (packed and strategy in _BEST_FIT):
            found["packing"] = Packing.PADDING_FREE

    def _read_length(self, found: dict[str, object]) -> None:
        key = "max_length" if "max_length" in self.values else "max_seq_length"
        if key in self.values and self.values[key] is None:
            self.notes.append(f"{key} is null: sequences are not cut; give seq_len")
            return
        length = self._padded(self.count(key, default=TRL_LENGTH))
        found["seq_len"] = length
        default = "" if key in self.values else f" ({self.trl}'s default)"
        said = f"max_length {length}{default} is taken for the length of every sequence"
        if self.given.get("seq_len") is not None:
            return
        packed = self.trl == "SFTConfig" and self.flag("packing")
        self.notes.append(f"{said}, as packing makes it" if packed else f"{said}, an upper bound")

    def _generated_at_once(self, job: Mapping[str, object]) -> dict[str, object]:
        """Sequences of a rank, where another number is given than those of an optimizer step."""
        if job["kind"] != "grpo" or "rollout" in job:
            return {}
        if self.values.get("steps_per_generation") is not None:
            steps = self.count("steps_per_generation", default=1)
            return {"rollout_batch_size": steps * self.per_device()}
        if self.values.get("generation_batch_size") is None:
            return {}
        gpus = self.given.get("num_gpus")
        ranks = gpus if isinstance(gpus, int) else self.base.num_gpus
        return {
            "rollout_batch_size": ceil_div(self.count("generation_batch_size", default=1), ranks)
        }

    def _read_generated_length(self, found: dict[str, object]) -> None:
        """A prompt and what the model generates; ``vllm_max_model_length`` bounds both together."""
        bound = "max_prompt_length"
        cut = self.values.get(bound) is not None
        prompt = self.count(bound, default=TRL_PROMPT_LENGTH) if cut else TRL_PROMPT_LENGTH
        key = "max_completion_length"
        whole = self.values.get(key, TRL_COMPLETION_LENGTH) is None
        answer = TRL_COMPLETION_LENGTH if whole else self.count(key, default=TRL_COMPLETION_LENGTH)
        most = self.values.get("vllm_max_model_length")
        length = prompt + answer
        if most is not None:
            length = min(length, self.count("vllm_max_model_length", default=length))
        found["seq_len"] = self._padded(length)
        if self.given.get("seq_len") is None:
            said = (
                f"{bound} {prompt}" if cut else f"a prompt of {prompt} tokens, which nothing cuts"
            )
            self.notes.append(
                f"{length} tokens are taken for the length of every sequence: {said}, and "
                f"{key} {answer}"
            )

    def _padded(self, length: int) -> int:
        """A length as the collator pads it (``pad_to_multiple_of``)."""
        multiple = self.values.get("pad_to_multiple_of")
        if multiple in (None, "auto", 0):
            return length
        multiple = self.count("pad_to_multiple_of", default=1)
        return ceil_div(length, multiple) * multiple

    def _read_quantization(self, found: dict[str, object], options: Mapping[str, object]) -> None:
        """How ``from_pretrained`` packs the weights: a ``BitsAndBytesConfig``, or flags of one."""
        config = options.get("quantization_config")
        flags = {key: options[key] for key in _LOADED_IN if options.get(key)}
        if not config and not flags:
            return
        from memplan.training.quantization_config import read_quantization_config

        key = "model_init_kwargs.quantization_config"
        if config and not isinstance(config, Mapping):
            self.refuse(key, f"write a mapping, not {config!r}")
        try:
            how = read_quantization_config(config if isinstance(config, Mapping) else flags)
        except SetupError as error:
            self.refuse(key, str(error))
        if how is None:
            self.refuse(key, "is not modelled; bitsandbytes', GPTQ's and AWQ's are")
        found["quantize"] = replace(how, prequantized=how.format.is_calibrated)

    def _read_loading(self, found: dict[str, object]) -> None:
        """``model_init_kwargs``: how the trainer loads the model, where it does."""
        options = self.nested("model_init_kwargs") or {}
        self._read_quantization(found, options)
        named = options.get("attn_implementation")
        if named is not None:
            kernel = ATTENTION_NAMES.get(str(named))
            if kernel is None:
                known = ", ".join(ATTENTION_NAMES)
                advice = f"{named!r} is not modelled; there are {known}"
                self.refuse("model_init_kwargs.attn_implementation", advice)
            found["attention"] = AttentionKernel(kernel)
        dtype = str(options.get("dtype", options.get("torch_dtype", "float32"))).split(".")[-1]
        if dtype == "bfloat16":
            self.half_weights = True
        elif dtype != "float32":
            self.notes.append(
                f"model_init_kwargs.dtype {dtype}: weights are counted as the precision says; "
                "bf16-autocast and bf16 are weights in bf16"
            )
