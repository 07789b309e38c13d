"""Operations counted: FLOPs of a step, read off the same tape as its memory."""
