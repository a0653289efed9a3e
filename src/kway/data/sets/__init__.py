"""Named data sets, one file each: ``load(data_dir, seed)`` returns a ``kway.data.sources.Source``.

What is heavy is imported in ``load``: lists of sets, and of what can be downloaded, are read off these files.
"""
