"""Sound on the tape: signals, Conformers, decoders of transcripts."""
