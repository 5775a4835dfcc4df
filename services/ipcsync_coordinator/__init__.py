"""The coordinator daemon: it owns every shared event and outlives every importer of one."""
