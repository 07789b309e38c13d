"""What stands where attention does: convolutions, linear attention, the delta rule."""
