"""Tensors that a model's own code keeps alive, or makes leaves of the graph: variables, caches, outputs."""

from memplan.graph.core.recording import Recording
from memplan.graph.core.tensors import Parameter, Storage, Tensor


class Lifetimes(Recording):
    """A recording that knows what variables hold."""

    def hold(self, tensor: Tensor) -> None:
        """Keep a tensor alive beyond its last reader, until ``release``: an outer variable."""
        tensor.storage.held = True

    def hold_graph(self, *tensors: Tensor) -> None:
        """Hold tensors that the model keeps past backward, where a checkpointed segment makes them anew.

        The graph of the second run goes with them, and what its operations keep.
        """
        for tensor in tensors:
            self.hold(tensor)
        self.keep_graph(*tensors)

    def keep_graph(self, *tensors: Tensor) -> None:
        """The same of tensors that names hold: the graph of a checkpointed segment's second run."""
        if not self.segment.checkpointed:
            return
        wanted = {tensor.storage for tensor in tensors}
        held: dict[Storage, None] = dict.fromkeys(wanted)
        for operation in reversed(self.segment.operations):
            if any(each.storage in wanted for each in operation.outputs):
                wanted |= {each.storage for each in operation.inputs if each.requires_grad}
                held.update(dict.fromkeys(operation.saved))
        own = [each for each in held if each.segment == self.segment.index]
        self.segment.graph_held += tuple(own)

    def cache(self, tensor: Tensor) -> None:
        """Hold a tensor of every repetition of the segment until the loss is there."""
        self.hold(tensor)
        self.cached.append((tensor, self.segment))

    def release_cache(self) -> None:
        """Let all that was cached go at the end of the present segment."""
        for tensor, segment in self.cached:
            self.segment.releases += [tensor.storage] * segment.repeat

    @property
    def cached_once(self) -> frozenset[Storage]:
        """Cached in a first pass alone: backward keeps what it makes anew."""
        return frozenset(each.storage for each, segment in self.cached if segment.checkpointed)

    def release(self, tensor: Tensor) -> None:
        """Let a held tensor go at the end of the present segment."""
        self.segment.releases.append(tensor.storage)

    def release_here(self, tensor: Tensor) -> None:
        """Let a held tensor go behind the latest operation; of a segment that is repeated, at its end."""
        self.release(tensor)
        if self.segment.repeat == 1:
            self.segment.released[tensor.storage] = max(len(self.segment.operations) - 1, 0)
            self._touches += 1
            tensor.storage.touched = self._touches

    def give_out(self, tensor: Tensor) -> None:
        """Return a tensor beside the loss: it dies with the outputs, once the forward pass is over."""
        self.hold(tensor)
        self.release(tensor)

    def linger(self, tensor: Tensor) -> None:
        """Keep a tensor alive until the present segment ends: a name in its frame."""
        self.segment.lingering.append(tensor)

    def let_input_go(self) -> None:
        """Note that the model's own variable names something else than the segment's input from here on."""
        x = self.segment.input
        if x is not None and not (x.storage.held or x.storage.kept_by_maker):
            self.segment.input_let_go = len(self.segment.operations) - 1

    def leaf(self, tensor: Tensor) -> None:
        """Let a made tensor require a gradient: both stay until the backward pass is over."""
        if self.options.without_gradients:
            return
        tensor.requires_grad = True
        self.hold(tensor)
        self.leaves.append(tensor)

    def embedded(self, tensor: Tensor, table: Parameter) -> None:
        """Note that the input embeddings' module returns this: it may be made to require a gradient.

        Then that gradient reaches the module, though it stops there.
        """
        if self.options.input_gradients and not tensor.requires_grad:
            self.leaf(tensor)
            self.segment.left.append((0, table.module))

    def carry(self, *tensors: Tensor) -> None:
        """Note that the model's own variable holds tensors until the next layer has returned."""
        self.segment.carried = tuple(each.storage for each in tensors)
