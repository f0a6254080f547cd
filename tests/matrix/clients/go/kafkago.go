package main

import (
	"context"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/sasl"
	"github.com/segmentio/kafka-go/sasl/plain"
	"github.com/segmentio/kafka-go/sasl/scram"
)

var kafkaGoCodecs = map[string]kafka.Compression{
	"none": 0, "gzip": kafka.Gzip, "snappy": kafka.Snappy, "lz4": kafka.Lz4, "zstd": kafka.Zstd,
}

// bearer is OAUTHBEARER (RFC 7628), which the library leaves to its user.
type bearer string

func (b bearer) Name() string { return "OAUTHBEARER" }

func (b bearer) Start(context.Context) (sasl.StateMachine, []byte, error) {
	return b, []byte("n,,\x01auth=Bearer " + string(b) + "\x01\x01"), nil
}

func (b bearer) Next(context.Context, []byte) (bool, []byte, error) { return true, nil, nil }

// where sends each message where the job wants it: the writer's own balancer knows keys only.
type where map[*byte]int32

func (w where) Balance(message kafka.Message, _ ...int) int { return int(w[&message.Value[0]]) }

func kafkaGo(ctx context.Context, j *job, o *output) {
	s := &j.Security
	var mechanism sasl.Mechanism
	var err error
	switch s.Mechanism {
	case "PLAIN":
		mechanism = plain.Mechanism{Username: s.User, Password: s.Password}
	case "SCRAM-SHA-256":
		mechanism, err = scram.Mechanism(scram.SHA256, s.User, s.Password)
	case "SCRAM-SHA-512":
		mechanism, err = scram.Mechanism(scram.SHA512, s.User, s.Password)
	case "OAUTHBEARER":
		mechanism = bearer(s.Token)
	}
	must(err)
	j.batches(func(codec string, records []record) {
		places := where{}
		writer := &kafka.Writer{
			Addr: kafka.TCP(j.Bootstrap), Topic: j.Topic, Balancer: places, RequiredAcks: kafka.RequireAll,
			Compression: kafkaGoCodecs[codec], BatchBytes: 2_000_000, BatchTimeout: 5 * time.Millisecond,
			Transport: &kafka.Transport{TLS: s.tls(), SASL: mechanism},
		}
		var sent []kafka.Message
		for _, r := range records {
			message := kafka.Message{Key: r.key(), Value: unhex(r.Value)}
			places[&message.Value[0]] = r.Partition
			for _, header := range r.Headers {
				message.Headers = append(message.Headers, kafka.Header{Key: header[0], Value: unhex(header[1])})
			}
			sent = append(sent, message)
		}
		must(writer.WriteMessages(ctx, sent...))
		must(writer.Close())
	})
	for part := 1; part <= 2; part++ {
		reader := kafka.NewReader(kafka.ReaderConfig{
			Brokers: []string{j.Bootstrap}, GroupID: j.Group, Topic: j.Topic, StartOffset: kafka.FirstOffset,
			MaxBytes: 10_000_000, MaxWait: 500 * time.Millisecond,
			Dialer: &kafka.Dialer{Timeout: 10 * time.Second, DualStack: true, TLS: s.tls(), SASLMechanism: mechanism},
		})
		for o.wants(part) {
			message, err := reader.FetchMessage(ctx)
			must(err)
			var headers [][2]string
			for _, header := range message.Headers {
				headers = append(headers, [2]string{header.Key, hexed(header.Value)})
			}
			o.write(part, int32(message.Partition), message.Offset, message.Key, message.Value, headers)
			must(reader.CommitMessages(ctx, message))
		}
		must(reader.Close())
	}
}
