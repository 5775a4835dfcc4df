from ipcsync._engines.core_python import Look as Look

INTERFACE: int
