"""What pages of HTML are made of: the frame, tables, the layout of a step, colours."""
