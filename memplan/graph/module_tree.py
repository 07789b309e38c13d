"""A model's modules as a tree, with the parameters under each; equal layers stand once."""

from memplan.fast_dataclass import dataclass, field
from memplan.graph.core.segments import Segment
from memplan.graph.core.tape import Tape


@dataclass(slots=True)
class ModuleNode:
    """A module: the weights it owns, and the modules inside it."""

    name: str
    count: int = 1
    """How many times it stands in its parent."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The weights it owns itself, by name."""
    children: dict[str, "ModuleNode"] = field(default_factory=dict)
    own_params: int = 0
    """Parameters that one of it owns itself."""

    @property
    def num_params(self) -> int:
        """Parameters of one of it, everything inside included."""
        return self.own_params + sum(
            child.count * child.num_params for child in self.children.values()
        )

    def child(self, name: str) -> "ModuleNode":
        """The module of this name inside it, made if it is not there."""
        if name not in self.children:
            self.children[name] = ModuleNode(name)
        return self.children[name]

    def to_dict(self) -> dict[str, object]:
        """The tree as nested plain values."""
        return {
            "name": self.name,
            "count": self.count,
            "num_params": self.num_params,
            "weights": {name: list(shape) for name, shape in self.shapes.items()},
            "modules": [child.to_dict() for child in self.children.values()],
        }


def module_tree(tape: Tape, name: str) -> ModuleNode:
    """The tree of everything on the tape that owns parameters."""
    root = ModuleNode(name)
    numbers: dict[str, int] = {}
    for segment in tape.segments:
        if segment.parameters:
            _add(root, segment, numbers)
    return root


def _add(root: ModuleNode, segment: Segment, numbers: dict[str, int]) -> None:
    start = numbers.get(segment.name, 0)
    numbers[segment.name] = start + segment.num_copies
    label = segment.name
    if segment.num_copies > 1 or label in root.children or segment.is_layer:
        last = start + segment.num_copies - 1
        label = f"{label}.{start}" if last == start else f"{label}.{start}-{last}"
    node = root.child(label)
    node.count = segment.num_copies
    for parameter in segment.parameters:
        owner = node
        for part in filter(None, parameter.module.split(".")):
            owner = owner.child(part)
        weight = parameter.name.rpartition(".")[2]
        owner.shapes[weight] = parameter.matrix_shape
        owner.own_params += parameter.num_weights
