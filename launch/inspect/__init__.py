"""`dhelix inspect`: reads XLA's dumps (files, HLO text of any version, the target) and analyses the step."""
