"""Models of pictures and of videos: transformers over patches, networks of convolutions, detectors."""
