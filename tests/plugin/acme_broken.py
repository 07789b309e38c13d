"""A plug-in that cannot be imported."""

msg = "no licence\nwas found"
raise RuntimeError(msg)
