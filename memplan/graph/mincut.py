"""A minimum cut through a small network, by Dinic's algorithm."""

from collections import deque

UNBOUNDED = 1 << 62
"""A capacity that no cut goes through."""


class FlowNetwork:
    """Nodes 0 to n - 1 and directed edges with capacities."""

    def __init__(self, num_nodes: int) -> None:
        self.edges: list[list[int]] = [[] for _ in range(num_nodes)]
        """For each node, its edges' numbers; that of the way back differs in the last bit."""
        self.ends: list[int] = []
        self.left: list[int] = []

    def connect(self, start: int, end: int, capacity: int = UNBOUNDED) -> None:
        """Add an edge."""
        self.edges[start].append(len(self.ends))
        self.edges[end].append(len(self.ends) + 1)
        self.ends += (end, start)
        self.left += (capacity, 0)

    def sink_side(self, source: int, sink: int) -> set[int]:
        """Nodes behind the minimum cut that is nearest to the sink.

        >>> network = FlowNetwork(3)
        >>> network.connect(0, 1, 2)
        >>> network.connect(1, 2, 5)
        >>> sorted(network.sink_side(0, 2))
        [1, 2]
        """
        while self._levels(source, sink):
            starts = [0] * len(self.edges)
            while self._push(source, sink, starts):
                pass
        return self._reaching(sink)

    def _levels(self, source: int, sink: int) -> bool:
        self.level = [-1] * len(self.edges)
        self.level[source] = 0
        waiting = deque([source])
        while waiting:
            node = waiting.popleft()
            for edge in self.edges[node]:
                end = self.ends[edge]
                if self.left[edge] and self.level[end] < 0:
                    self.level[end] = self.level[node] + 1
                    waiting.append(end)
        return self.level[sink] >= 0

    def _push(self, source: int, sink: int, starts: list[int]) -> int:
        """Send as much as goes along one way; 0 when there is none left."""
        path: list[int] = []
        node = source
        while node != sink:
            edges = self.edges[node]
            while starts[node] < len(edges):
                edge = edges[starts[node]]
                end = self.ends[edge]
                if self.left[edge] and self.level[end] == self.level[node] + 1:
                    path.append(edge)
                    node = end
                    break
                starts[node] += 1
            else:
                if not path:
                    return 0
                node = self.ends[path.pop() ^ 1]
                starts[node] += 1
        amount = min(self.left[edge] for edge in path)
        assert amount < UNBOUNDED // 2, "what must be kept cannot be"
        for edge in path:
            self.left[edge] -= amount
            self.left[edge ^ 1] += amount
        return amount

    def _reaching(self, sink: int) -> set[int]:
        found = {sink}
        waiting = [sink]
        while waiting:
            node = waiting.pop()
            for edge in self.edges[node]:
                start = self.ends[edge]
                if self.left[edge ^ 1] and start not in found:
                    found.add(start)
                    waiting.append(start)
        return found
