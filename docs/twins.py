"""For griffe: a function decorated as the twin of another one has its parameters, as `help` shows it."""

from __future__ import annotations

import re
from typing import Any

import griffe

_TWIN = re.compile(r"(twin|taking)\((?:(\w+)\.)?(\w+)[,)]")


class Twins(griffe.Extension):
    """Gives each twin its parameters once the whole package is loaded."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Look at the asynchronous client."""
        if pkg.name != "ipcsync":
            return
        module = pkg["client.aio.client"]
        for function in [*module.functions.values(), *module["AsyncClient"].functions.values()]:
            for decorator in function.decorators:
                found = _TWIN.match(str(decorator.value))
                if found:
                    home, name = found[2], found[3]
                    plain = pkg["client.client"][home][name] if home else pkg["client._connecting"][name]
                    function.parameters = plain.parameters
                    function.decorators = []
                    if found[1] == "twin":
                        function.labels.add("async")
