"""What a process holds of a coordinator: clients, what they open and list, and asyncio."""
