//! The load that the owner of a region publishes for the policies that divide by load: connections in flight, and the parts
//! of calls that the region keeps and admits. These policies are not in the product.

/// The load of a region as it is published.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    /// Connections of the region's own clients, wherever they are open.
    pub(crate) demand: f64,
    /// The part of its own clients' calls that the region keeps, and that of what visitors may bring which it admits.
    pub(crate) limits: Limits,
}

/// The parts of calls that a region keeps and admits, moved by its owner in slow steps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) keeps: f64,
    pub(crate) admits: f64,
    /// No move before this time.
    frozen: f64,
    /// The time for which a move freezes the next one; it doubles with each change of direction, and falls back.
    pause: f64,
    direction: f64,
}

/// The period of measurements in seconds.
pub(crate) const PERIOD: f64 = 10.0;
/// The delay of what is published, in seconds.
pub(crate) const DELAY: (f64, f64) = (1.0, 5.0);
/// The load at which the limits close and open, and the one that a move aims at.
const BAND: (f64, f64) = (0.75, 0.90);
const AIM: f64 = 0.82;
/// The time without moves after a move, in seconds, and the longest one after changes of direction.
const PAUSE: (f64, f64) = (2.0 * PERIOD + 10.0, 300.0);
/// A region that is full keeps at least this part: a claim that it is full cannot be disproved.
const KEEPS_LEAST: f64 = 0.5;

impl Default for Limits {
    fn default() -> Self {
        Self { keeps: 1.0, admits: 1.0, frozen: 0.0, pause: PAUSE.0, direction: 0.0 }
    }
}

impl Limits {
    /// Moves the limits by the load, in parts of the declared capacity, and the share of the load that visitors bring.
    pub(crate) fn step(&mut self, load: f64, visitors: f64, now: f64) {
        if now < self.frozen || (BAND.0..=BAND.1).contains(&load) {
            return;
        }
        let before = (self.keeps, self.admits);
        if load > BAND.1 {
            // First visitors, then residents.
            let excess = load.min(2.0) - AIM;
            let by_visitors = load * visitors;
            self.admits *= if by_visitors > 0.0 { (1.0 - excess / by_visitors).max(0.0) } else { 1.0 };
            let excess = (excess - by_visitors).max(0.0);
            let kept = (1.0 - excess / (load * (1.0 - visitors)).max(0.01)).max(0.5);
            self.keeps = (self.keeps * kept).max(KEEPS_LEAST);
        } else {
            let opened = |part: f64| (part + (0.25 * (AIM - load) * part).max(0.02)).min(1.0);
            match self.keeps < 1.0 {
                true => self.keeps = opened(self.keeps),
                false => self.admits = opened(self.admits),
            }
        }
        if (self.keeps, self.admits) != before {
            let direction = (BAND.0 - load).signum();
            let is_reversed = direction * self.direction < 0.0;
            self.pause =
                if is_reversed { (self.pause * 2.0).min(PAUSE.1) } else { (self.pause * 0.9).max(PAUSE.0) };
            self.direction = direction;
            self.frozen = now + if load > BAND.1 || is_reversed { self.pause } else { 0.0 };
        }
    }
}
