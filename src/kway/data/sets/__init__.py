"""Named data sets, one file each: ``load(data_dir, seed)`` returns a ``kway.data.images.Source``."""
