"""Models as the classes that they are: tensors that names hold, modules, layers recorded once.

A class declares weights and children in its constructor and says operations in ``forward``, with ordinary
variables. How long a variable holds a tensor is counted by Python itself: ``memplan.graph.modules.run``.
"""
