"""Says what to install if JAX is missing or too old; imported before the modules that need it."""

MIN_JAX = (0, 8)
_NEEDED = f"blackwell_sparsek.jax needs jax {'.'.join(map(str, MIN_JAX))} or newer"

try:
    import jax
except ImportError as _missing:
    way_out = "pip install 'blackwell-sparsek[jax]', with Python 3.11 or newer"
    raise ImportError(f"{_NEEDED}: {way_out}") from _missing


def check_version(version: str) -> None:
    """Refuse a JAX that is too old to run this."""
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_JAX:
        raise ImportError(f"{_NEEDED}, got {version}: pip install --upgrade jax")


check_version(jax.__version__)
