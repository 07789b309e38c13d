"""Towers for sound: convolutions of a signal, Conformers, codecs."""
