"""The tests of ipcsync, in folders by subject: README.md says which."""
