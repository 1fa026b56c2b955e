"""The README as a package index shows it, where links into the repository lead nowhere.

Hatchling calls this when it builds (`tool.hatch.metadata.hooks.custom` in pyproject.toml).
"""

import pathlib
import re

from hatchling.metadata.plugin.interface import MetadataHookInterface

_INSTALL = re.compile(r"^pip install '?\.(\[[\w,]+\])?'? *#.*$", re.MULTILINE)


def long_description(readme):
    """Text without pictures, comments and relative links; pip installs by name."""
    text = re.sub(r"^!\[[^\]]*\]\((?!\w+://)[^)]*\)\n+", "", readme, flags=re.MULTILINE)
    text = re.sub(r"^<!--.*?-->\n+", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\[([^\]]+)\]\((?!\w+://)[^)\s]*\)", r"\1", text)
    return _INSTALL.sub(_by_name, text)


def _by_name(line):
    extras = line[1] or ""
    return f"pip install 'blackwell-sparsek{extras}'" if extras else "pip install blackwell-sparsek"


class LongDescription(MetadataHookInterface):
    """Gives the project its readme."""

    def update(self, metadata):
        """Set `readme` from README.md."""
        readme = (pathlib.Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = long_description(readme)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
