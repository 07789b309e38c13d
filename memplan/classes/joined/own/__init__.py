"""Language models that see whose text and tower are made for one another: Gemma 4, Llama 4, Llama 3.2 Vision, Step 3.7."""
