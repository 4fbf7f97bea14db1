//! Exact shares of traffic, and the whole numbers that represent them on the wire (`docs/split-horizon.md, "The rules"`).
//!
//! Shares are fractions of any size. The gateways of a network split the weight of its endpoints in proportion to their own
//! weights, which can be up to 2^32 − 1. Common denominators of such fractions exceed machine words, so the shares are big
//! numbers.

use num_bigint::BigUint;
use num_integer::Integer;
use num_rational::Ratio;

/// A share of traffic.
pub type Share = Ratio<BigUint>;

/// The largest weight in an assignment; larger weights are scaled down.
const WEIGHT_MAX: u32 = 1 << 20;
/// The largest sum of the weights of one assignment; clients refuse a larger sum.
const SUM_MAX: u64 = u32::MAX as u64;

/// Returns a whole weight as a [`Share`].
pub fn share(weight: u64) -> Share {
    Ratio::from_integer(BigUint::from(weight))
}

/// The largest common denominator, in bits, with which weights are exact. Peers say how many gateways they have and how these are
/// weighted, so a common denominator could have thousands of bits.
const EXACT_BITS: u64 = 1 << 10;

/// Returns the common denominator of the shares, or a power of two in its place if it is too large.
fn denominator(shares: &[(Share, usize)]) -> BigUint {
    let mut common = BigUint::from(1_u8);
    for (share, _) in shares {
        common = common.lcm(share.denom());
        if common.bits() > EXACT_BITS {
            return BigUint::from(1_u8) << EXACT_BITS;
        }
    }
    common
}

/// Returns the smallest whole numbers in the proportion of the shares. Each share comes with the number of entries that have
/// it. If the largest number exceeds 2^20, or the sum exceeds 2^32 − 1, the numbers are scaled down and rounded half up, to
/// at least 1.
///
/// No share may be 0.
pub fn whole(shares: &[(Share, usize)]) -> Vec<u32> {
    let denominator = denominator(shares);
    let numbers: Vec<BigUint> =
        shares.iter().map(|(share, _)| share.numer() * &denominator / share.denom()).collect();
    let divisor = numbers.iter().fold(BigUint::ZERO, |all, number| all.gcd(number));
    let Some(largest) = numbers.iter().max().map(|largest| largest / &divisor) else {
        return Vec::new();
    };
    let numbers: Vec<BigUint> = numbers.into_iter().map(|number| number / &divisor).collect();
    let count: u64 = shares.iter().map(|(_, entries)| *entries as u64).sum();
    let mut limit = u64::from(WEIGHT_MAX);
    loop {
        let weights: Vec<u32> = numbers.iter().map(|number| scaled(number, &largest, limit)).collect();
        let sum: u64 = weights
            .iter()
            .zip(shares)
            .map(|(weight, (_, entries))| u64::from(*weight) * *entries as u64)
            .sum();
        if sum <= SUM_MAX || limit <= 1 {
            return weights;
        }
        // Rounding can increase each number. The new limit leaves room for this increase, so that the sum fits in the next
        // iteration.
        limit = (limit * SUM_MAX.saturating_sub(count) / sum).max(1).min(limit - 1);
    }
}

/// Returns `number` if `largest` is at most `limit`; otherwise scales `number` so that `largest` becomes `limit`.
fn scaled(number: &BigUint, largest: &BigUint, limit: u64) -> u32 {
    let limit_big = BigUint::from(limit);
    let scaled = if *largest <= limit_big {
        number.clone()
    } else {
        let two = BigUint::from(2_u8);
        (number * &limit_big * &two + largest) / (largest * two)
    };
    // The result is at most `limit`, which is at most 2^20.
    u32::try_from(scaled).unwrap_or(WEIGHT_MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_common_denominator_is_given_up_for_a_power_of_two() {
        let is_prime = |number: &u64| {
            (2..*number).take_while(|by| by * by <= *number).all(|by| !number.is_multiple_of(&by))
        };
        let primes: Vec<u64> = (1_000..4_000).filter(is_prime).collect();
        let shares: Vec<(u64, u64)> = primes.iter().map(|prime| (1, *prime)).collect();
        assert!(denominator(&[]).bits() == 1 && of(&shares).len() == primes.len());
        let weights = of(&shares);
        let exact = |at: usize| (1 << 20) as f64 * primes[0] as f64 / primes[at] as f64;
        assert!(weights.iter().enumerate().all(|(at, weight)| (f64::from(*weight) - exact(at)).abs() < 1.0));
    }

    fn of(shares: &[(u64, u64)]) -> Vec<u32> {
        let shares: Vec<_> = shares
            .iter()
            .map(|(numerator, denominator)| {
                (Ratio::new(BigUint::from(*numerator), BigUint::from(*denominator)), 1)
            })
            .collect();
        whole(&shares)
    }

    #[test]
    fn proportions_are_exact_and_smallest() {
        assert_eq!(of(&[]), [0_u32; 0]);
        assert_eq!(of(&[(7, 1)]), [1]);
        assert_eq!(of(&[(2, 1), (4, 1), (6, 1)]), [1, 2, 3]);
        assert_eq!(of(&[(1, 1), (3, 2), (3, 2)]), [2, 3, 3]);
        assert_eq!(of(&[(5, 7), (5, 8), (5, 9), (5, 11)]), [792, 693, 616, 504]);
    }

    #[test]
    fn large_ones_are_scaled_to_the_largest_and_rounded_half_up() {
        assert_eq!(of(&[(1 << 20, 1), (3, 1)]), [1 << 20, 3]);
        assert_eq!(of(&[(1 << 21, 1), (1, 1), (3, 1)]), [1 << 20, 1, 2]);
        assert_eq!(of(&[(u64::MAX, 1), (1, 1)]), [1 << 20, 1]);
        // The common denominator of these shares has more than 128 bits.
        let primes = [4_294_967_291, 4_294_967_279, 4_294_967_231, 4_294_967_197, 4_294_967_189];
        let shares: Vec<_> = primes.iter().map(|prime| (1, *prime)).collect();
        assert_eq!(of(&shares), [1 << 20; 5]);
    }

    #[test]
    fn the_sum_stays_below_what_clients_take() {
        let shares = [(share(1 << 20), 10_000), (share((1 << 20) - 1), 10_000), (share(1), 10)];
        let weights = whole(&shares);
        let sum: u64 =
            weights.iter().zip(&shares).map(|(weight, (_, count))| u64::from(*weight) * *count as u64).sum();
        assert!(sum <= SUM_MAX && sum > SUM_MAX / 2, "{weights:?}: {sum}");
        assert_eq!(weights[2], 1);
    }
}
