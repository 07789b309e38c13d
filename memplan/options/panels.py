"""Headings that options stand under in the help."""

MODEL_PANEL = "Model"
HARDWARE_PANEL = "Hardware"
TRAINING_PANEL = "Training"
OUTPUT_PANEL = "Output"
