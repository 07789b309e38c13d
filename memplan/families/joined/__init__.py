"""Words beside pictures and sound: language models with towers, pairs of towers, one transformer for both."""
