"""What imports torch: models, engines and training steps, on a card or on fake tensors.

It must be imported by ``memplan.verify.run`` alone, once torch is known to be there.
"""
