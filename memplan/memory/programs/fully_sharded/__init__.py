"""FSDP2: loading, gathering, reducing, and a pipeline's stage of it."""
