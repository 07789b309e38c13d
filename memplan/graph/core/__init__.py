"""What a tape is made of: tensors, operations with their rules, segments, and what is recorded how."""
