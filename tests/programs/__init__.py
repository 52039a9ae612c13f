"""Programs that repeat what the tests sample; run by hand."""
