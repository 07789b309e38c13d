"""Models of sound: wav2vec 2.0 and its kin, recognizers and translators of speech, codecs."""
