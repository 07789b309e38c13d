"""Modules: weights and children as a constructor declares them, and what a call runs."""

from collections.abc import Callable, Iterator
from typing import Any

from memplan.dtypes import DType
from memplan.graph.core.splits import Split
from memplan.graph.core.tensors import Parameter
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.run import Run
from memplan.graph.splitting.tensor_parallel import gather_sequence
from memplan.model.parameters import LayerBlock, ModelPart, WeightRole, beside_of, owner_of
from memplan.training.choices_of_kernels.fp8 import Fp8Recipe

STACKS = "encoder", "decoder"
"""Stacks that can be frozen whole, by the beginning of their segments' names."""


class Weight:
    """A parameter as a constructor declares it: ``torch.nn.Parameter``."""

    __slots__ = ("dtype", "name", "of_linear", "owner", "role", "shape", "trainable")

    def __init__(
        self,
        *shape: int,
        role: WeightRole = WeightRole.MATRIX,
        of_linear: bool = False,
        dtype: DType | None = None,
        trainable: bool = True,
    ) -> None:
        self.shape = shape
        self.role = role
        self.dtype = dtype
        """Its format whatever the model's is; None: that of the model."""
        self.trainable = trainable
        self.of_linear = of_linear
        """It is the matrix of a linear layer, which may be packed."""
        self.owner: Module | None = None
        """The first module that declares it; others that do so too are tied to it."""
        self.name = ""

    def copy(self) -> "Weight":
        """One of the same kind, which another module owns."""
        return Weight(*self.shape, role=self.role, of_linear=self.of_linear)


class Site:
    """Where a model's modules are recorded: one for all of them, so that they serve one tape after another."""

    __slots__ = ("run",)

    run: Run


class Module:
    """Children and weights in the order in which they are declared, and what a call runs."""

    site: Site
    path = ""
    """Its name in the whole class."""
    within = ""
    """Its name in its segment: the layer that it is in, or the whole class."""
    segment: tuple[str, ModelPart] | None = None
    """The segment that begins where it is called."""
    gathers = False
    """It is given a share of each sequence and reads all of them (``PrepareModuleInput``)."""
    gathers_codes = True
    """Linear layers alone read them, in 8 bits where these multiply so."""
    hands_on = 0
    """So many of what a layer returns beside the hidden states the next one is given, and returns again."""
    further = 0
    """So many of a layer's arguments behind the hidden states are streams that nothing but it reads, and
    that it returns behind them: a prompt's."""
    split = Split.WHOLE
    """What a rank has of it."""
    is_given_names = False
    """Its caller names all arguments, where stage 3's hook behind backward passes looks at those without a name alone."""
    begins_names = False
    """Names in its segments begin inside it: it is the base model."""
    block: LayerBlock | None = None
    """The block of a layer that its tensors count as; None: that of what it is in."""
    forward: Callable[..., Any]
    """What a call runs, once everything around it is noted."""

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, Module):
            self.children[name] = value
        elif isinstance(value, Weight):
            if value.owner is None:
                value.owner, value.name = self, name
            self.weights[name] = value
        object.__setattr__(self, name, value)

    @property
    def children(self) -> "dict[str, Module]":
        """Modules in it, by the names of its attributes."""
        found: dict[str, Module] = self.__dict__.setdefault("_children", {})
        return found

    @property
    def weights(self) -> dict[str, Weight]:
        """Its own weights, and those that are tied to another module's."""
        found: dict[str, Weight] = self.__dict__.setdefault("_weights", {})
        return found

    def modules(self) -> "Iterator[tuple[str, Module]]":
        """All modules in it, each with its own name."""
        for name, each in self.children.items():
            yield name, each
            yield from each.modules()

    def parameters(self) -> Iterator[Weight]:
        """Weights that it owns, then those of its children."""
        yield from (each for each in self.weights.values() if each.owner is self)
        for each in self.children.values():
            yield from each.parameters()

    def named_parameters(self) -> Iterator[Weight]:
        """Each weight where a constructor first names it, tied ones too."""
        yield from dict.fromkeys(self._all_weights())

    def _all_weights(self) -> Iterator[Weight]:
        yield from self.weights.values()
        for each in self.children.values():
            yield from each._all_weights()

    @property
    def spans_segments(self) -> bool:
        """It has layers in it, so that no segment has all of it."""
        return any(each.spans_segments for each in self.children.values())

    @property
    def run(self) -> Run:
        """The tape."""
        return self.site.run

    def attach(self, site: Site, path: str = "", within: str = "") -> bool:
        """Give it and all in it a tape and their names; returns whether any of them owns weights."""
        if self.segment is not None and self.segment[1] is ModelPart.HEAD:
            within = path  # the task's own modules stand in the same segment
        self.site, self.path, self.within = site, path, within
        owns = bool(self.weights)
        for name, each in self.children.items():
            inner = name if self.begins_names or not within else f"{within}.{name}"
            owns |= each.attach(site, f"{path}.{name}" if path else name, inner)
        self.__dict__["owns_weights"] = owns
        return owns

    owns_weights = True
    """It or a module in it owns weights: an engine's hooks are known from these."""

    def __call__(self, *args: Any) -> Any:
        """Run ``forward``, with the hooks that engines hang on modules around it."""
        run = self.run
        if self.segment is not None and run.segment.part is not ModelPart.HEAD:
            name, part = self.segment
            stack = name.partition(".")[0]
            run.start(name, args[0].record, part=part, frozen=self.is_frozen(part, stack))
        if self.gathers:
            args = (gathered(args[0], narrow=self.gathers_codes), *args[1:])
        if self.block is not None:
            around, run.block = run.block, self.block
            made = self._between_hooks(*args)
            run.block = around
            return made
        if self.owns_weights:
            return self._between_hooks(*args)
        run.enter(self.within)
        made = self.forward(*args)
        if isinstance(made, Handle) and made.requires_grad:
            run.leave(self.within)
        return made

    def _between_hooks(self, *args: Any) -> Any:
        """Run ``forward``, and note from where to where."""
        segment, start = self.run.segment, len(self.run.segment.operations)
        if self.is_given_names:
            segment.unhooked.add(self.within)
        made = self.forward(*args)
        if self.run.segment is segment:
            segment.spans.append((start, len(segment.operations), self.within))
        return made

    def read_apart(self, *inside: "Module", called: bool) -> None:
        """It reads all weights of modules inside it by itself (``self.conv1d.weight``), which are also ``called`` later, or never.

        Stage 3 gathers each then and there, and from then on whenever it is called itself (deepspeed 0.19.8,
        runtime/zero/parameter_offload.py, ``ZeROOrderedDict.__getitem__``).
        """
        for each in inside:
            for weight in each.weights.values():
                self.run.read(self.within, f"{each.within}.{weight.name}")
            if not called:
                self.run.segment.unmade.add(each.within)

    def behind_hook(self, x: Handle) -> Handle:
        """An argument that it reads several times, or that others read too, where it is given by its place.

        An engine's hook sums up the gradients of what it reads before they go on (deepspeed 0.19.8,
        runtime/zero/parameter_offload.py, ``_post_backward_module_hook``); FSDP2's stands before layers alone
        (torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param_group.py, ``RegisterPostBackwardFunction``).
        """
        options = self.run.options
        is_hooked = options.module_hooks or (options.layer_hooks and not self.within)
        return x.aliased() if is_hooked and x.requires_grad else x

    def is_frozen(self, part: ModelPart, stack: str = "decoder") -> bool:
        """Whether a segment is not trained, of a stack where it is a part of one."""
        freeze, owner = self.run.options.freeze, owner_of(stack)
        whole = bool(owner and getattr(freeze, owner))
        if (whole or beside_of(stack)) and owner not in STACKS:
            return whole  # parts of a language model are none of the towers beside it
        parts = {
            ModelPart.EMBEDDING: freeze.embeddings, ModelPart.HEAD: freeze.head,
            ModelPart.NORM: freeze.norm or whole, ModelPart.LAYERS: whole,
        }  # fmt: skip
        return parts.get(part, False)

    def parameter(self, weight: Weight) -> Parameter:
        """The tape's record of a weight: declared where its owner's segment first reads it.

        A module that shares another segment's weight is tied to it.
        """
        run, owner = self.run, weight.owner
        assert owner is not None
        found, here = run.parameters.get(weight), self.is_here(weight)
        if found is not None and owner is not self and not here:
            return run.own_copy(found, self.within)
        if found is None or not here:
            within = "" if owner.begins_names else owner.within
            name = f"{within}.{weight.name}" if within else weight.name
            found = owner.declare(name, weight)
            self.declared(weight, found)
        return found

    def is_here(self, weight: Weight) -> bool:
        """Whether the open segment has declared it already."""
        found = self.run.parameters.get(weight)
        return found is not None and any(found is each for each in self.run.segment.parameters)

    def declare(self, name: str, weight: Weight) -> Parameter:
        """Put a weight of its own on the tape, or what a rank has of it."""
        if weight.of_linear:
            return self.run.matrix(name, *weight.shape, role=weight.role)
        return self.run.parameter(
            name, *weight.shape, role=weight.role, dtype=weight.dtype, trainable=weight.trainable
        )

    def declared(self, weight: Weight, parameter: Parameter) -> None:
        """Note what a weight is on the tape; behind gathered sequences each rank has a part of its gradient."""
        run, owner = self.run, weight.owner
        assert owner is not None
        run.parameters[weight] = parameter
        run.place(weight, parameter)
        parameter.of_linear = weight.of_linear
        beginning = owner.path.removesuffix(owner.within)
        if owner.begins_names and owner.path:
            beginning = f"{owner.path}."
        run.beginnings.setdefault(run.segment.name, beginning)
        group = run.options.tensor_parallel
        if group is not None and group.sequence and not parameter.is_distributed:
            parameter.added_up = parameter.is_distributed = True

    def operand(self, weight: Weight, dtype: DType | None = None) -> Handle:
        """A weight as an operand, in another format where one is named."""
        record = self.parameter(weight)
        held = Handle(self.run, record, record.shape)
        return held if dtype is None else held.to(dtype)


def gathered(x: Handle, *, narrow: bool) -> Handle:
    """All of the sequences of which each rank has a share."""
    group, record = x.run.options.tensor_parallel, x.record
    assert group is not None
    *rows, length, width = x.shape
    if narrow and x.run.options.fp8 is not Fp8Recipe.NONE:
        from memplan.graph.fp8 import narrowed, narrows  # only then

        record = narrowed(x.run, record) if narrows(x.run) else record
    record = gather_sequence(x.run, group, record)
    return Handle(x.run, record, (*rows, length * group.degree, width))


def become(module: Module, cls: type[Module]) -> None:
    """Put a class in the place of a module's own."""
    object.__setattr__(module, "__class__", cls)


def with_methods(replaced: type[Module], own: type[Module]) -> type[Module]:
    """A class with some methods of another's in the place of its own."""
    return type(own.__name__, (replaced, own), {})
