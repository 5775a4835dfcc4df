"""What the tests share: peers and what they do, conditions with a deadline, a raw client, a browser, the driver."""
