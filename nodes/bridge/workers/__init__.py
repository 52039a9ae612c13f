"""Worker groups in use, the memory they occupy, and the user's settings for them."""
