"""Writes the files of a machine that is not here under a folder, as its ``/proc`` and ``/sys`` would hold them."""


def planted(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root
