"""Training steps of a setup run by torch itself, beside which a prediction is laid.

``memplan verify`` is the only way in. What needs torch and transformers (the extra ``verify``) is in
``on_torch``, which nothing else may import; the rest of memplan does without both.
"""
