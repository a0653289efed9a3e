"""What there is to say about how a run was set up."""

from kway.data.loader import Loader
from kway.data.padding import uneven
from kway.strategies.engine import Engine


def set_up_notices(engine: Engine, *loaders: Loader) -> list[str]:
    """Return lines for the user about the data and how steps run, known so far on any rank. A collective."""
    everyone = engine.mesh.world.objects
    data = [line for loader in loaders for line in loader.parts.notices]
    data += uneven(everyone, *(loader.shapes for loader in loaders))
    return data + [line for own in everyone(engine.notices) for line in own]
