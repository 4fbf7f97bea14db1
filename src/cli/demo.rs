//! `isthmus demo`.

use std::io::Write;

use super::Failure;

#[derive(Debug, clap::Args)]
pub struct Args {}

pub(super) fn run(_: &Args, _: &mut impl Write) -> Result<(), Failure> {
    Err(Failure::Wrong("not yet".to_owned()))
}
