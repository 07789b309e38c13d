"""Models of sound: speech in, words out, or the other way round; codecs."""
