"""A model's parameters and buffers, as segments declare them: frozen, adapted, packed or tied."""

from memplan.dtypes import DType
from memplan.errors import ConfigError
from memplan.graph.core.lifetimes import Lifetimes
from memplan.graph.core.overlay import BASE_LAYER, ORIGINAL, adapted_weights
from memplan.graph.core.segments import BUFFER_WORDS, Buffer
from memplan.graph.core.tensors import ExpertShare, Parameter, Storage, Tensor, allocated_bytes
from memplan.model.parameters import ModelPart, WeightRole


class Weights(Lifetimes):
    """A recording whose segments own parameters."""

    def parameter(
        self,
        name: str,
        *shape: int,
        module: str = "",
        dtype: DType | None = None,
        trainable: bool = True,
        experts: ExpertShare | None = None,
        of_adapter: bool = False,
        role: WeightRole = WeightRole.MATRIX,
    ) -> Parameter:
        """Declare a weight of the present segment, owned by ``module`` (by default its prefix).

        Beside an adapter the model's own are frozen, but for those that it trains too.
        """
        there = self._declared(name, of_adapter=of_adapter)
        if there is not None:
            return there
        self._check_shape(name, shape)
        module = module or name.rpartition(".")[0]
        trainable = trainable and not self.frozen and (of_adapter or self._is_named(name))
        copied = False
        if self.adaptation is not None and not of_adapter:
            copied = self.adaptation.saves(self.segment.name, self._repetition, module)
            is_bias = name.endswith(".bias")
            trainable &= is_bias and self.adaptation.trains_bias(module, self.adapted)
            name, module = self._wrapped(name, module, ORIGINAL if copied else "")
        made = Parameter(
            name,
            shape,
            dtype or self._usual_dtype(role),
            module=module,
            trainable=trainable and not self.options.without_gradients,
            experts=experts,
            of_adapter=of_adapter,
            role=role,
            block=self.block,
        )
        self._declare(made, is_trained=trainable)
        return self._trained_copy(made) if copied else made

    def _wrapped(self, name: str, module: str, copy: str) -> tuple[str, str]:
        """A weight's name and its module's beside an adapter, which puts a wrapper around both."""
        wrapper = copy or (BASE_LAYER if module in self.adapted else "")
        wrapper += BASE_LAYER * len(adapted_weights(self.adapted, module))
        return f"{module}{wrapper}{name.removeprefix(module)}", module + wrapper

    def _declared(self, name: str, *, of_adapter: bool) -> Parameter | None:
        """A weight that is there already: of a segment that runs again, or of a module that is called twice."""
        if self._again is not None:
            wrapped = f"{name.rpartition('.')[0]}{BASE_LAYER}.{name.rpartition('.')[2]}"
            found = [each for each in self._again.parameters if each.name in (name, wrapped)]
            if found:
                return found[0]
            assert of_adapter, name  # DoRA's magnitudes are declared where they are first read
        if of_adapter:
            # A module that is called twice has one adapter.
            for each in self.segment.parameters:
                if each.name == name:
                    return each
        return None

    def _is_named(self, name: str) -> bool:
        """Whether it is among those that alone are trained, where some are."""
        alone = self.options.trained
        return alone is None or alone.trains(self.segment.name, self._repetition, name)

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        if all(size >= 1 for size in shape):
            return
        sizes = " x ".join(str(size) for size in shape)
        msg = (
            f"{self.source}: {name}: this weight would be of {sizes} elements: one of the "
            "config's sizes, ratios or multipliers is too small"
        )
        raise ConfigError(msg)

    @property
    def _has_gradients(self) -> bool:
        """Of weights that are trained whatever else is."""
        return not (self.frozen or self.options.without_gradients)

    def _declare(self, made: Parameter, *, is_trained: bool) -> None:
        """It is one of the present segment; trained elsewhere, where the pass is without gradients."""
        self.segment.parameters.append(made)
        if is_trained and not made.requires_grad:
            self.trained_leaves.add(made)

    def own_copy(self, weight: Parameter, module: str) -> Parameter:
        """An earlier segment's weight, or the copy that a module of this one trains in its place."""
        if self.adaptation is None:
            return weight
        if not self.adaptation.saves(self.segment.name, self._repetition, module):
            return weight
        made = Parameter(
            f"{module}.modules_to_save.default.weight", weight.shape, weight.dtype,
            module=f"{module}.modules_to_save.default", trainable=self._has_gradients,
            of_adapter=True, role=WeightRole.OUTPUT, block=self.block,
        )  # fmt: skip
        self._declare(made, is_trained=not self.frozen)
        return made

    def tie(self, weight: Parameter, module: str) -> None:
        """Note that a module of the present segment owns another module's weight too."""
        self.segment.tied.append((module, weight))

    def matrix(
        self,
        name: str,
        out_features: int,
        in_features: int,
        *,
        module: str = "",
        role: WeightRole = WeightRole.MATRIX,
    ) -> Parameter:
        """Declare the weight of a ``torch.nn.Linear``: packed where the base is quantized.

        What a task adds stays as it is: the output matrix, and a head that is trained beside it
        (transformers 5.23, quantizers/base.py, ``get_keys_to_not_convert``).
        """
        whole = self.parameter(name, out_features, in_features, module=module, role=role)
        quantizer = self.options.quantizer
        stays = whole.of_adapter or self.segment.part is ModelPart.HEAD
        if quantizer is None or stays or self._again is not None:
            return whole
        return quantizer.pack(self, whole)

    def bias(self, name: str, weight: Parameter) -> Parameter:
        """Declare a linear layer's bias; one beside codes is kept in the format of their product.

        (bitsandbytes 0.50.2, ``Linear4bit.forward``: ``bias.data = bias.data.to(x.dtype)``)
        """
        dtype = None
        if weight.packed is not None:
            dtype = weight.packed.quantization.compute_dtype
        return self.parameter(name, weight.matrix_shape[0], dtype=dtype, role=WeightRole.OTHER)

    def buffer(
        self,
        numel: int,
        dtype: DType,
        *,
        before: str = "",
        behind: bool = False,
        module: str = "",
        loaded: tuple[int, DType] | None = None,
    ) -> Tensor:
        """Declare a tensor that the present segment's module owns beside its parameters, which stand
        before it unless ``before`` names some; ``behind``: its module is the model's last; ``module``: its own.

        ``loaded``: how many numbers it has before the segment first runs, and in which format, where a forward
        pass makes it anew; none of them: it makes it at all.
        """
        storage = Storage(allocated_bytes(numel, dtype), -1, 0)
        is_made = loaded is not None and loaded != (numel, dtype)
        made_bytes = storage.num_bytes if is_made else 0
        first = loaded or (numel, dtype)
        self.hold_buffer(*first, before=before, behind=behind, module=module, made_bytes=made_bytes)
        return Tensor(numel, dtype, storage)

    def hold_buffer(
        self,
        numel: int,
        dtype: DType,
        words: str = BUFFER_WORDS,
        *,
        before: str = "",
        behind: bool = False,
        module: str = "",
        made_bytes: int = 0,
    ) -> None:
        """Note a buffer of the present segment that no operation reads as it is (``Buffer``)."""
        position = len(self.segment.parameters)
        self.buffers.append(
            Buffer(self.segment, position, numel, dtype, words, before, behind, module, made_bytes)
        )

    @property
    def buffers_bytes(self) -> int:
        """All buffers together, once every segment has run [bytes]."""
        return sum(each.kept_bytes * each.segment.repeat for each in self.buffers)

    def _usual_dtype(self, role: WeightRole) -> DType:
        norms = self.options.norms
        return norms if norms is not None and role is WeightRole.NORM else self.options.compute

    def _trained_copy(self, original: Parameter) -> Parameter:
        """The copy that is trained in a weight's place (peft's ``ModulesToSaveWrapper``)."""
        module = f"{original.module.removesuffix(ORIGINAL)}.modules_to_save.default"
        made = Parameter(
            f"{module}.{original.name.rpartition('.')[2]}", original.shape, original.dtype,
            module=module, trainable=self._has_gradients, experts=original.experts,
            of_adapter=True, role=original.role, block=original.block,
        )  # fmt: skip
        self._declare(made, is_trained=not self.frozen)
        return made
