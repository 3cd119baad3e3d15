"""Recent windows of prompts and of finished requests are kept, so that a prefix hit computes nothing again."""
