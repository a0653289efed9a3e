"""Checkpoints on disk: nested state in safetensors and JSON, written atomically in the background, never unpickled.

``writer.Writer`` saves a ``snapshot.Snapshot`` while training goes on, ``reading.newest`` finds the newest
complete one. ``optimizer`` names the entries of an optimizer, ``names`` the tensors of a wrapped model.
Nothing here is collective: one rank saves what all ranks would.
"""
