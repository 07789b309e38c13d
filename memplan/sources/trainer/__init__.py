"""Arguments of Hugging Face's Trainer and of TRL's trainers, one module for each part of what they say."""
