"""What other projects load by their own plugin interfaces: `lmcache`, `ray`, `vllm`. Nothing else imports it."""
