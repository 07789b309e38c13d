"""A plug-in of another interface."""

MEMPLAN_INTERFACE = 0
model = {"model_type": "llama"}
