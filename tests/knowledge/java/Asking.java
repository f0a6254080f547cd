import java.io.BufferedReader;
import java.io.ByteArrayOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.reflect.InvocationTargetException;
import java.nio.charset.StandardCharsets;
import java.time.Instant;
import java.util.Arrays;
import org.apache.kafka.common.utils.Exit;

/**
 * Kafka's command line tools as they are asked for: a line of the input is a main class and its arguments, apart by
 * tabs. The answer: a line with when it began, when it ended (ns), its status and how many bytes follow; then its output.
 */
class Asking {
    static class Ended extends RuntimeException {
        final int status;

        Ended(int status, String message) {
            super(message);
            this.status = status;
        }
    }

    static Integer first; // some tools exit within what they catch, and exit again

    static void end(int status, String message) {
        first = first == null ? status : first;
        throw new Ended(status, message);
    }

    static long now() {
        Instant now = Instant.now();
        return now.getEpochSecond() * 1_000_000_000L + now.getNano();
    }

    public static void main(String[] arguments) throws Exception {
        Exit.setExitProcedure(Asking::end);
        Exit.setHaltProcedure(Asking::end);
        Exit.setShutdownHookAdder((name, hook) -> { });
        PrintStream answers = System.out;
        BufferedReader asked = new BufferedReader(new InputStreamReader(System.in));
        for (String line; (line = asked.readLine()) != null; ) {
            String[] parts = line.split("\t");
            ByteArrayOutputStream output = new ByteArrayOutputStream();
            System.setOut(new PrintStream(output, true));
            long begin = now();
            int status = run(parts[0], Arrays.copyOfRange(parts, 1, parts.length));
            System.out.flush();
            byte[] told = output.toByteArray();
            answers.write((begin + " " + now() + " " + status + " " + told.length + "\n").getBytes(StandardCharsets.US_ASCII));
            answers.write(told);
            answers.flush();
        }
        Runtime.getRuntime().halt(0);
    }

    static int run(String main, String[] arguments) throws Exception {
        first = null;
        try {
            Class.forName(main).getMethod("main", String[].class).invoke(null, (Object) arguments);
        } catch (InvocationTargetException thrown) {
            if (thrown.getCause() instanceof Ended) {
                return first;
            }
            thrown.getCause().printStackTrace();
            return 99;
        }
        return first == null ? 0 : first;
    }
}
